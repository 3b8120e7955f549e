"""Jobs over a queue's tables: SQL, replay, choice of dead letters, audit."""
