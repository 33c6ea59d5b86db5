"""A Page as one HTML file that needs nothing else: no network, no other file.

`render.py` fills in the template page.html (Jinja2, which escapes every text); page.css is the look, and page.js what
sorts, filters, copies, opens the icicle and zooms the timeline. Without it the page still reads.
"""
