"""What several commands share: flags, output files, streaming, tables."""
