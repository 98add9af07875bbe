"""Fluxion: a network predicts what each head needs of the host; and its baseline with a fixed share."""
