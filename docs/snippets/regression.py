import mcbn
from trained import diabetes

net, train_loader, val, (x, y) = diabetes()  # your network and data

bayes = mcbn.MCBN(net, "regression").fit(train_loader, n_samples=100)
bayes.tune(val)  # the noise of the targets, on held-out data
pred = bayes.predict(x)

low, high = pred.interval(0.9)
for i in range(3):
    print(f"{pred.mean[i]:5.2f} ± {pred.std[i]:.2f}, 90 % between {low[i]:5.2f} and {high[i]:5.2f}; true {y[i]:5.2f}")
print(f"inside the 90 % interval: {((low < y) & (y < high)).float().mean():.0%} of {len(y)}")
