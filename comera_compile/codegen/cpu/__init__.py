"""Kernels in C++ for the CPU, with what calls them."""
