"""Attention on one device's blocks: its definition, the online softmax, the ring, the kernels of accelerators."""
