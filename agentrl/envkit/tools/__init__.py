"""Tools that a model can call: schemas made from Python functions, and validation and running of calls."""
