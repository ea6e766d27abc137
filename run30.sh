for s in 1 2 3; do
 a=$(date +%s.%N)
 timeout 120 .venv/bin/python main.py data=text data.path=/tmp/shk30.txt trainer.max_minutes=1 trainer.seed=$s run_name=s$s > /tmp/s30_$s.log 2>&1
 b=$(date +%s.%N)
 echo "seed $s seconds $(echo "$b-$a"|bc)" 
 .venv/bin/python sample.py run_dir=runs/s$s score=/tmp/shk30rest.txt 2>&1 | tail -3
done
