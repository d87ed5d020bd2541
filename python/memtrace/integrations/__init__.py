"""A few lines each for the loops that other libraries write: Lightning, Hugging Face's
Trainer, and loops of one's own."""
