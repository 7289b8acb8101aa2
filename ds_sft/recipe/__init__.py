"""The science: recipes, LR schedule, cadence, batching, decay mask. Numbers in, numbers out."""
