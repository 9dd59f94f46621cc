"""For operators: doctor, board, drill, advice on ttls, and metrics. The core does not import it."""
