"""Lower bounds by message passing (TRW-S)."""
