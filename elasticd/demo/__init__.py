"""`elasticd demo`: a real job on a real etcd replans around a slowed worker, and a report of it."""
