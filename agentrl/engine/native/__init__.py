"""Operators compiled on this machine: ``operators.cpp``, how it is built, and its functions for tensors."""
