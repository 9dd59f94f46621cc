"""``make play``: the example as a page to click on; docs/play.md describes it."""
