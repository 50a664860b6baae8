"""kvpress in an environment of its own: `make bench-kvpress`."""
