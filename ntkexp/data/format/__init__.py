"""Files of data in the formats in which they are handed around, checked cell by cell."""
