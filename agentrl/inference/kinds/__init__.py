"""The kinds of inference server, one file each; ``kind.py`` says what a kind is."""
