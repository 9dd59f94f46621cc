"""This process: real threads and clocks under any pool, greenlets reached from a thread, the kernel's kill timer."""
