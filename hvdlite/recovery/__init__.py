"""What lets a job go on after ranks or hosts are lost: survivors, the last commit, and who is a rank next."""
