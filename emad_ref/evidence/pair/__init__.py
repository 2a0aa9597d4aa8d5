"""What one run knows of a pair: a small and a large model that write one text; items of tasks, answered by decoding."""
