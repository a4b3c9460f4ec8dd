"""What a run reads, and the batches that it is turned into."""
