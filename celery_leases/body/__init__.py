"""What the body can do through its handle: effects, and what stands for them where there is no lease."""
