"""One job's machine, as the leader runs it: phases and values, and the steps from one to the next."""
