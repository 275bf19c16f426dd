"""The coordinator: plans groups, owns the ledger, computes advantages and drives the steps of a run."""
