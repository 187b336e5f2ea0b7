"""Simulation: the real controller under a virtual clock, with simulated servers, environments and trainer."""
