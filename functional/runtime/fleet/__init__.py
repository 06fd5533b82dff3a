"""The processes of a run: etcd, NATS, the frontend and the workers, each under a guard, and how workers are asked."""
