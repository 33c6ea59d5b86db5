"""How fast ranks communicate."""
