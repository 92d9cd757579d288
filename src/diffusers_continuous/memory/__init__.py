"""Where the state of accepted rows lies: pages of one pool, and host memory for rows that are paused."""
