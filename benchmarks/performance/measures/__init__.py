"""One module for each measurement, with ``measure(bench, quick)``, which returns a finding."""
