"""Task folders of Harbor and Terminal-Bench: read (``folder``, ``tasks``), carried out in a box (``task_box``), scored (``score``)
and checked (``proof``)."""
