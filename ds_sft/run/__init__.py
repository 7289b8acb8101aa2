"""The life of a run directory: manifest, metrics, checkpoints, resume, exports, verification."""
