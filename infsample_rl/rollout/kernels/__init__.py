"""Decode kernels: Triton on CUDA, compiled C++ on the CPU."""
