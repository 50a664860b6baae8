"""Measurements of the library's claims, one script a claim."""
