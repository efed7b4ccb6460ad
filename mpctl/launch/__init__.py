"""From a legal plan to running ranks: check, prepare, spawn, watch, account."""
