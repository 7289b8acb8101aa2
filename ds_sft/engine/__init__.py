"""DeepSpeed: the configuration, the engine, one optimizer step, the start-up proofs."""
