"""Watches the loops inside trainers of other libraries, one trainer a file. Each file needs its own library alone."""
