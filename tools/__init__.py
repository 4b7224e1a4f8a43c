"""`dflash-shards`, the demo, and what needs several rooms at once. No room imports this one."""
