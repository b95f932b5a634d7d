"""The side channel between the ranks: who is present, who is lost, and the end of a job that lost one."""
