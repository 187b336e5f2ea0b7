"""Operators compiled on this machine: the source ``operators.cpp``, its build, and its functions on tensors."""
