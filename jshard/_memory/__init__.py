"""What is in device memory when: liveness, fusion, order; from the program alone."""
