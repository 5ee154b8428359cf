"""Tables, sentences and pictures of finished runs, from their records alone and without torch."""
