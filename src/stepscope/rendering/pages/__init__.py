"""What somebody sees on the page of a run, of several runs, of a capture, and of any other answer: a file each.

A page is made of the Answers that verbs show in a terminal, in an order for the eye, and of a sentence and a few large
figures that are in none of them. Nothing here knows of HTML: html.py shows a Page.
"""
