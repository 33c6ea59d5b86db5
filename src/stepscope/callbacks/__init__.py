"""Watches loops inside others' trainers, one a file: each needs its own library, and no other."""
