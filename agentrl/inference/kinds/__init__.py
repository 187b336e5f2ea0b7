"""The kinds of inference server, one file each; ``kind.py`` defines their base class."""
