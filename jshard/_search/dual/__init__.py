"""Lower bounds: a core in, the TRW-S bound, messages and reduced costs out."""
