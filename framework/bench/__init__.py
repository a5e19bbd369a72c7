"""`shardlight bench`: measures this package beside its peers, in one interleaved run, and holds it to its bars."""
