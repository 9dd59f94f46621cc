"""``make play``: the example as a page to click on; docs/tutorial/play.md describes it."""
