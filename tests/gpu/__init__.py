"""What holds on a processor holds on a GPU; without one these tests are skipped."""
