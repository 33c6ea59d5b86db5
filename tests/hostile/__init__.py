"""What the tool must survive, done to it on purpose: each file one campaign, `python -m tests.hostile.NAME`.

A short form of each runs in `make test`; the long ones are `make hostile`, and keep their results under
`results/cpu/hostile`.
"""
