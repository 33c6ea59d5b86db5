"""What the site adds to Sphinx, one matter a file; each is an extension."""
