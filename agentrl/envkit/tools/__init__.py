"""Tools that a model may call: from a Python function to its schema, and from a call in text to checked arguments."""
