"""Programs to copy from, each run as `python -m revdeq.examples.NAME` after `pip install 'revdeq[demo]'`."""
