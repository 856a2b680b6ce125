"""Memory model: program -> fusion, liveness, live intervals, HBM traffic and order; no plan is needed."""
