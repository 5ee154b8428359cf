"""Tables, sentences and pictures of finished runs, from their files alone, without torch."""
