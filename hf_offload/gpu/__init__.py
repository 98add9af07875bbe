"""Operations on the device: digest scores, block choice, paged attention, merge, exchange and copies of blocks."""
